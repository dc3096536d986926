"""Many machines: the questions of several apps, answered by workers on other nodes, with Celery and Redis between them.

    app: pool ─► supervisor ─► connection ══► board (Redis) ══► worker ─► supervisor ═► its own confined job server
                                   └── a turn, by Celery ──────────┘

What Celery delivers is a turn, a message that holds nothing: whoever gets it takes the question whose turn it is from the board.
Celery's queues over Redis are lists, in which nobody can be put before another, taken out, or told a place. So the line is the
board's (`sizer.service.broker.board`), and Celery's are delivery, places of work, acknowledgement and routes: a turn that a worker
died with is delivered again. Nothing is unpickled; on the board are JSON and tapes, which are read as a job server's are.

$SIZER_BROKER switches it on. Only these modules import Celery and Redis (deploy/requirements-broker.txt).
"""
