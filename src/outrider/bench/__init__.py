"""Measurements: bench, audit, tune, and the simulator that predicts speeds on other machines.

``session.py`` is a whole bench. The rooms are ``audit`` (is it lossless here?), ``peers`` (other engines) and ``surplus``
(what hidden states know).

    what is run       settings, suites, runner, decode, limits
    what comes out    results, tally, stats, summary, provenance: figures and their origin
    how it is shown   table, report, report_style, svg, compare
    the machine       costs, curves, bandwidth, memory
    elsewhere         simulate, simulate_pearl, simulate_easyspec, capacity, replay, validate
    the fastest       tune, tune_config
"""
