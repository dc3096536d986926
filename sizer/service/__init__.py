"""Jobs in child processes with limits.

    client ─► connection ═► server ─► job_process ═► template ═► job_child ─► tasks     (═► into a process of its own)

job is a job as callers of client see it, pool keeps results, settings are the limits, preload and stdin belong to server; template
has imported what a job needs and seen none. local answers the command `estimate` of one person without a server. broker has workers
on other nodes in the place of a server. Nothing here imports torch but the functions of tasks, which the child calls, and local's
worker.
"""
