"""The words of every command: its options, their defaults and their meaning. Nothing here imports PyTorch."""
