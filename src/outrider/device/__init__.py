"""Twins on a GPU of what runs between two passes of the target: drafters, the choice with its sampler, the walk and the commit.

The folders mirror those of the host: ``drafters/`` and ``acceptance/``, and ``core/sampling.py`` in ``sampling/``. A part
declares its twin where it is defined (``device_twin``), and the engine builds captured rounds out of twins
(``engine/round_graph.py``). The part on the host stays the oracle of its twin.
"""
