"""Holds many connections at once and tells each the port it comes from. Ends them when the peer does."""
import selectors
import socket

selector = selectors.DefaultSelector()
listener = socket.create_server(("", 9200), backlog=4096)
selector.register(listener, selectors.EVENT_READ)
print("ready")
while True:
    for key, _ in selector.select():
        if key.fileobj is listener:
            conn, peer = listener.accept()
            conn.sendall(b"%d\n" % peer[1])
            selector.register(conn, selectors.EVENT_READ)
        elif not key.fileobj.recv(1):
            selector.unregister(key.fileobj)
            key.fileobj.close()
