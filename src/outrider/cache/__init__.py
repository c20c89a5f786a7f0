"""Key-value caches and recurrent states. One file per memory layout; all implement ``core.interfaces.Cache``."""
