"""Our wire: length-prefixed frames that multiplex calls, streams and cancels over one socket."""
