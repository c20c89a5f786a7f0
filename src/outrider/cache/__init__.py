"""What models remember. One file per layout; all keep the promise of ``core.interfaces.Cache``."""
