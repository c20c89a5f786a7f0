"""Guesses from small trained heads that read the target's hidden states.

A file named as a method declares its row. Methods that draft the same way share one drafter, so read that file next:

    newest.py          medusa, l_mtp, hydra              heads that read the newest states and remember nothing
    recurrent.py       mlp_speculator, redrafter         a small state per node, moved on by the node's token
    eagle.py           eagle1, eagle3, fspad             one layer over the target's features, with a cache of its own
    visual.py          msd, vispec, specvlm              EAGLE with images in the prompt
    block_drafter.py   dflash, dspark                    a block of open places in one pass

The other methods are whole in their own file: chimera, falcon, longspec, mtp, mtp_parallel, p_eagle. Below all of them lie

    head_drafter.py    what every drafter with heads does: read the new states, grow a tree, note the round
    head_growth.py     how a tree grows level by level     device_growers.py  the same inside captured rounds
    head_options.py    what a user may choose              trained.py         loading heads and checking their kind
    pending_states.py  states that wait to be read         token_window.py    keys and values of the last tokens alone

The modules, their tensors and their files are in ``models/heads``, one file per kind.
"""
