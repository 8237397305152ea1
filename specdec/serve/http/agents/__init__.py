"""The routes of coding agents: OpenAI's Responses and Anthropic's Messages, over chat requests."""
