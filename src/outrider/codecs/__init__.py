"""Codecs: prompts to tokens, and tokens to text. Also chat templates, tool calls and grammars."""
