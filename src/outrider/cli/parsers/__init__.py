"""The options of every command, with their defaults and meanings. Nothing here imports PyTorch."""
