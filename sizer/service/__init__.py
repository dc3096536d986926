"""Jobs in child processes with limits. Nothing here that the app imports (client, settings, wire) imports torch."""
