"""Child processes, for who starts them and for what runs in them. Standard library and the error tree alone.

wire         what travels between them: one JSON object per line
environment  what a child finds in os.environ
process      a child as its parent sees it: start, talk, kill
program      a module run as a program whose answer is one value
sandbox      what a child gives up before it reads what a stranger wrote
job          what a child does: run one job, write its progress and its result or error
"""
