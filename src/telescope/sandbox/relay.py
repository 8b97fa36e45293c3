"""Relays a port of a sandbox's own loopback to a Unix socket of the host. Runs inside the sandbox.

`python relay.py PORT SOCKET`. So the SDKs of model providers reach the endpoint of a rollout without any network.
"""

import asyncio
import contextlib
import sys


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies one direction until its end."""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()


async def serve(port: int, path: str) -> None:
    """Relays until the sandbox ends."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_host = await asyncio.open_unix_connection(path)
            await asyncio.gather(copy(reader, to_host[1]), copy(to_host[0], writer))
            to_host[1].close()
        except OSError as error:
            print(f"the endpoint cannot be reached: {error}", flush=True)
        finally:
            writer.close()

    server = await asyncio.start_server(relay, "127.0.0.1", port)
    print("listening", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))
