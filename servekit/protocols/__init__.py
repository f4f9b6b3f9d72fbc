"""What goes over HTTP and gRPC, without I/O: documents and bodies, no sockets."""
