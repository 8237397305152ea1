"""The engine over HTTP, as OpenAI's API has it. Needs the extra `server`."""
