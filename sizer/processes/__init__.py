"""Child processes: starting them, and the code that runs in them. Imports the standard library, the error tree and units only.

    process           a child as its parent sees it: a dialogue, or a single answer; environment holds its variables
    child, sandbox    a child from the inside: one job and its result; the rights it drops before it reads untrusted input
    wall, syscalls    the kernel's restrictions of a child, whatever code it runs
    wire, outcome     messages, one JSON object per line; a job's result, for its waiters
"""
