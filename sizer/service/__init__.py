"""Jobs in child processes with limits.

    client ─► connection ═► server ─► job_process ═► template ═► child ─► tasks     (═► into a process of its own)

job is a job as callers of client see it, cache keeps results, settings are the limits, preload and stdin belong to server; template
has imported what a job needs and seen none. Nothing here imports torch but the functions of tasks, which the child calls.
"""
