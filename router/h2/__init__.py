"""gRPC server over HTTP/2, in plaintext and over TLS.

grpcio passes each call through two threads, which costs more than a pick. Here the connection's thread reads
the message, calls the handler and writes the response. Servicers written for grpcio work unchanged.
"""

from router.h2.server import GrpcServer

__all__ = ["GrpcServer"]
