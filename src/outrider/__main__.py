"""``python -m outrider`` is the command line."""

from outrider.cli.main import console

if __name__ == "__main__":
    raise SystemExit(console())
