"""The direct path of the command line: one worker answers one question, and imports what that question needs.

    client: asking ─► worker: question, placeholders ─► forked, confined child: service.job_child, service.tasks

The worker is a process of its own, started by `asking` for the text of a report, and by `connection` for other answers. It has no
queue, no supervisor and no spare: those are of the job server, which commands of many questions use.
"""
