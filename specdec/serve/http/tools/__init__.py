"""Tool calls and reasoning in the text of an answer: read from it, and asked for by a grammar."""
