"""Jobs in child processes with limits.

    client ─► connection ═► server ─► job_process ═► child ─► tasks          ═► is a process of its own

job is a job as callers of client see it, cache keeps results, settings are the limits, preload and stdin belong to server. Nothing
here imports torch but the functions of tasks, which the child calls.
"""
