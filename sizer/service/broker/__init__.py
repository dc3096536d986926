"""Many machines: workers on other nodes answer the questions of several apps, connected by Celery and Redis.

    app: pool ─► supervisor ─► connection ══► board (Redis) ══► worker ─► supervisor ═► its own confined job server
                                   └── a turn, by Celery ──────────┘

Celery delivers turns. A turn is an empty message: its receiver takes the next question from the board. Celery's queues over
Redis are lists, which do not support reordering, removal or positions. The board therefore keeps the order
(`sizer.service.broker.board`). Celery provides delivery, workers, acknowledgement and routes: the turn of a worker that died is
delivered again. Nothing is unpickled. The board holds JSON and tapes, which are read as those of a job server.

$SIZER_BROKER enables it. Only these modules import Celery and Redis (deploy/requirements-broker.txt).
"""
