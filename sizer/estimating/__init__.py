"""From a request, or from your own code, to a report. Imports torch, except `scopes`.

    Request ─► model ─► work ─► tracer ─► estimator ─► Report         server_model, server_profile ─► server_report
                                  │                                   custom: your own module or step
                                store: names of cached results, and devices that share them; scopes: questions that share them

`cautions` are the notes of a report. A change to the traced work of a mode belongs to `tracer`, to its texts to `estimator`.
"""
