"""From a request, or from your own code, to a report. Imports torch, except `scopes`.

    Request ─► model ─► work ─► tracer ─► estimator ─► Report         server_model, server_profile ─► server_report
                                  │                                   custom: a module or a step of your own
                                kept: under which names results are kept, and which devices share them; scopes: which questions do

`cautions` are the notes of a report. A change of what is traced for a mode belongs to `tracer`, of what is said to `estimator`.
"""
