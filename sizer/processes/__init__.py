"""Child processes, for who starts them and for what runs in them. Standard library, the error tree and units alone.

process, program  a child as its parent sees it: one to talk to, one that answers once; environment is what they find
child, sandbox    a child from the inside: one job and its result; what it gives up before it reads untrusted input
wall, syscalls    what the kernel keeps it from, whatever code it runs
wire, outcome     what travels between them, one JSON object per line; what a job came to, for whoever waits for it
"""
