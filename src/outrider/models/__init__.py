"""Targets and drafts: everything that turns tokens into logits.

``load.py`` opens a model by name, and ``decoder.py`` is the plain decoder that every fast one is compared with.

    rooms             native (CPU), gpu, attention: fast passes; recurrent, heads, gguf, quantised, parallel: kinds of models
    opening           load, source, weight_files, checkpoint, info, dtypes, decoder_choice, peft_adapter, export_formats
    what a model is   config, config_parts, families, features, names
    the plain pass    decoder, decoder_weights, weights, layers, norms, rope, experts, latent, latent_weights, prefill, linear
    fewer bits        few_bits, packed, planes, stored_rows, padded_heads
    keys and values   pools: the pages of a model's cache
    many processes    companion, remote, remote_worker, rank_sums, share, layer_share, layer_groups, lent_pages
    transformers      hf, hf_cache, hf_check, hf_verdict: any model that transformers knows, through its own modules
    small networks    acceptance_head, adapter, exit_predictor, judge_head, taught_model: trained parts that judge or draft
    wrappers          fuzzy, reduced, importance, sparse_prompts, host_side: models that read or say less, or run elsewhere
    for tests         tiny, random_decoder
"""
