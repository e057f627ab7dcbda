"""gRPC over plaintext HTTP/2, served by this process itself: connections in, calls of servicers' methods out.

grpcio hands each call through two threads, which costs more than a pick. Here a connection's own thread reads
a message, asks the method and writes the answer. Servicers are the same as grpcio's; TLS is grpcio's alone.
"""

from router.h2.server import GrpcServer

__all__ = ["GrpcServer"]
