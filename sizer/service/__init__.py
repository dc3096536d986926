"""Jobs in child processes with limits.

    client ─► connection ═► server ─► job_process ═► template ═► job_child ─► tasks     (═► another process)

job is a job as callers of client see it, pool caches results, settings are the limits, preload belongs to server.
template has imported the modules of every job and has read no job. local answers the command `estimate` of one user without a
server. broker uses workers on other nodes instead of a server. Only the functions of tasks, which the child calls, and local's
worker import torch.
"""
