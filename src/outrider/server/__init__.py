"""An OpenAI-compatible server on the engine: requests in over HTTP, rounds on one thread, tokens out as they are made.

A request goes through these files in this order.

    the door          run, connections, guard, keys, quota, fairness, disconnects: sockets, keys and limits
    the routes        app, protocol, responses_protocol, tool_protocol, information, embeddings: what may be asked
    what is stored    dialogue, response_store, stored_responses, response_items: responses that go on later
    to the engine     intake, chat_prompts, messages, tools, parameters, grammars, trial, queued_request: fields become requests
    the engine        worker, model_errands, prompt_scores, learning, models: one thread runs the rounds of a model
    the answer        service, answers, chat_answers, responses, transcript, token_texts, json_text: text goes back
    refusals          failures, refusals: errors as clients read them
    what is told      metrics, goodput, logs, spans, audit: numbers and lines about all of it

``settings.py`` holds every limit, ``tidy.py`` returns memory, and ``fleet/`` puts several engines behind one address.
"""
