"""Pictures of what happened: they read traces (``core/trace.py``) and nothing else."""
