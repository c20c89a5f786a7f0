"""The command line: one file per subcommand, with its options in ``parsers/``.

``main.py`` lists the subcommands, and ``parser.py`` says how all of them are read.

    text              generate, chat, demo, offline, route, why, explain, methods, verdict
    images            imagine, imagine_ways
    serving           serve, serve_models, serve_fleet, serve_learning
    measuring         bench, tune, audit, simulate, analyse, viz
    training          train, train_options, train_tasks, train_router
    files             info, inspect, export, trim, prune, datastore
    shared            options, progress, terminal
"""
