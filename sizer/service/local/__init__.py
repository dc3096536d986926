"""The direct path of the command line: one worker answers one question, and imports only the modules that it needs.

    client: asking ─► worker: question, placeholders ─► forked, confined child: service.job_child, service.tasks

The worker is a separate process, started by `asking` for the text of a report, and by `connection` for other answers. It has no
queue, no supervisor and no spare; those belong to the job server, for commands with many questions.
"""
