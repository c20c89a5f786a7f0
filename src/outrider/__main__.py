"""``python -m outrider`` is the command line."""

from outrider.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
