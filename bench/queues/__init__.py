"""The queue benchmark: one module for each system under test, and the driver that measures them all alike.

    command ──► measure ──► role (server)   ─┐
       │           │   ├──► role (producer)  ├─ each a process in the system's own environment: pipes, flight, …
       ▼           │   ├──► role (reward)    │
    report      figures└──► role (learner)  ─┘

`bench/queue.py` is the command.
"""
