"""The ground of every room: the error tree, bytes as text, versions, values to JSON and back, untrusted JSON. No torch."""
