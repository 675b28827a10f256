"""Many clients at once, with asyncio: asyncio_client.py ADDRESS. Each sends and reads back its own bytes."""
import asyncio
import hashlib
import sys

CLIENTS = 100
SIZE = 64 << 10
address = sys.argv[1]


async def echo(i):
    # Every other one over an IPv6 socket.
    host = address if i % 2 else "::ffff:" + address
    reader, writer = await asyncio.open_connection(host, 9100)
    data = bytes((i * 7 + j) % 253 for j in range(SIZE))
    writer.write(data)
    got = await reader.readexactly(SIZE)
    assert got == data
    peer, own = writer.get_extra_info("peername"), writer.get_extra_info("sockname")
    writer.write_eof()
    rest = await reader.read()
    writer.close()
    await writer.wait_closed()
    return f"{i} {own[0]} -> {peer[0]} {peer[1]} {hashlib.sha256(got).hexdigest()[:16]} {rest!r}"


async def main():
    for line in await asyncio.gather(*(echo(i) for i in range(CLIENTS))):
        print(line)
    try:
        await asyncio.wait_for(asyncio.open_connection(address, 9100), 10)
        print("once more")
    except OSError as error:
        print(error)
    reader, writer = await asyncio.open_connection(address, 9100)
    writer.write(b"report")
    print((await reader.read(100)).decode())


asyncio.run(main())
