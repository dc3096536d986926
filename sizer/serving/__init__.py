"""Memory of a language model server on a GPU: weights, the profile run's peak, and the KV cache in blocks and tokens.

    Architecture + Flags ──layout──► bytes of weights ─┐
    Profile (bytes of the profile run, traced) ────────┼──plan──► Served (sizer.report.served) ──words──► text
    gpu ──────────────────────────────────────────────-┘

All is arithmetic on integers, without torch. sizer.estimating counts the architecture and traces the profile run.
"""
