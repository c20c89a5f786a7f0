"""The nouns and the five interfaces. They depend on torch alone.

Begin with ``interfaces.py``; the other files are what its five interfaces speak of.

    one round        plan, reason, tree, draft, row_draft, scores, verdict, report, trace: what goes round, in this order
    a request        params, prompts, request, stopping, row_state: what is asked, and what has become of it
    chance           sampling, truncation, penalties, tempering, device_sampling: logits become a distribution
                     rng, random_source, choice, drafter_turns, equal_siblings: who draws from it, with which random numbers
    targets          guessing_target, layered_target, placing_target, reading_target, watched_target, wrapped_target: what some
                     targets can do beyond scoring; traits, route, prompt_reading, resume, translation go with them
    drafters         lasting_memory, rewinding: what some drafters declare
    captured rounds  device_round: drafters and rules that stay on the device
    the tables       method, method_rows, catalog, entry_points, errors, version: parts by name, and what is said of mistakes
    keys             key_storage: types in which a cache holds keys and values
    the machine      prices, own_time, side_thread, allocator, kept_json, regression: time, memory, threads and small files
"""
