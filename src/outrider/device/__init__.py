"""GPU versions of everything that runs between two passes of the target: drafters, sampler and choice, walk and commit.

The folders mirror those of the host: ``drafters/`` and ``acceptance/``, and ``core/sampling.py`` in ``sampling/``. Each GPU
version is called a *twin*. A part declares its twin where it is defined (``device_twin``), and the engine builds captured
rounds (CUDA graphs) out of twins (``engine/round_graph.py``). The part on the host stays the oracle of its twin.
"""
