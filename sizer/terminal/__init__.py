"""What the command line shows, as lines of plain text, a module for each thing shown. No torch."""
