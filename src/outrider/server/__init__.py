"""An OpenAI-compatible server on the engine: requests in over HTTP, rounds on one thread, tokens out as they are made."""
