"""Who owns a task and how far it is: the numbered log, leases, fences, attempts, member sets, heartbeats."""
