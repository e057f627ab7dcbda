"""gRPC over HTTP/2, in plaintext and over TLS, served by this process itself: connections in, calls out.

grpcio hands each call through two threads, which costs more than a pick. Here a connection's own thread reads
a message, asks the method and writes the answer. Servicers are the same as grpcio's.
"""

from router.h2.server import GrpcServer

__all__ = ["GrpcServer"]
