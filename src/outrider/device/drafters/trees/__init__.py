"""How trees grow inside captured rounds."""
