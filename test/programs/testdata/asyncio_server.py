"""Echoes on a dual-stack listener, with asyncio. Prints each peer when it is told to, sorted."""
import asyncio
import socket

peers = []


async def serve(reader, writer):
    peers.append((writer.get_extra_info("peername")[0], writer.get_extra_info("sockname")[:2]))
    while data := await reader.read(65536):
        if data == b"report":
            for peer in sorted(peers):
                print("peer", *peer)
            data = b"reported"
        writer.write(data)
        await writer.drain()
    writer.close()


async def main():
    sock = socket.create_server(("::", 9100), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
    server = await asyncio.start_server(serve, sock=sock)
    print("ready", sock.getsockname()[:2])
    async with server:
        await server.serve_forever()


asyncio.run(main())
