# Packets that a program may make itself where it has CAP_NET_RAW.


def internet_sum(b):
    if len(b) % 2:
        b += b"\0"
    n = sum(struct.unpack(f"!{len(b) // 2}H", b))
    while n >> 16:
        n = (n & 0xFFFF) + (n >> 16)
    return ~n & 0xFFFF


def ip_packet(src, dst, protocol, payload):
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(payload), 4711, 0, 64, protocol, 0, socket.inet_aton(src), socket.inet_aton(dst))
    return head[:10] + struct.pack("!H", internet_sum(head)) + head[12:] + payload


def heddle_option(network, src, dst, port, version=1, length=16):
    return struct.pack("!BBHHH", 253, length, 0x4864, version << 12 | network, port) + socket.inet_aton(dst) + socket.inet_aton(src)


def syn(src, sport, dst, dport, options=b""):
    options += b"\1" * (-len(options) % 4)
    tcp = struct.pack("!HHIIBBHHH", sport, dport, 12345, 0, (20 + len(options)) // 4 << 4, 2, 64240, 0, 0) + options
    pseudo = socket.inet_aton(src) + socket.inet_aton(dst) + struct.pack("!BBH", 0, 6, len(tcp))
    return ip_packet(src, dst, 6, tcp[:16] + struct.pack("!H", internet_sum(pseudo + tcp)) + tcp[18:])


def syn6(src, sport, dst, dport):
    src, dst = (socket.inet_pton(socket.AF_INET6, a) for a in (src, dst))
    tcp = struct.pack("!HHIIBBHHH", sport, dport, 12345, 0, 5 << 4, 2, 64240, 0, 0)
    check = internet_sum(src + dst + struct.pack("!II", len(tcp), 6) + tcp)
    return struct.pack("!IHBB", 6 << 28, len(tcp), 6, 64) + src + dst + tcp[:16] + struct.pack("!H", check) + tcp[18:]


def forge6(packet, dst):
    """Sends a whole IPv6 packet."""
    s = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_RAW)
    s.sendto(packet, (dst, 0))
    s.close()


def udp(src, sport, dst, dport, payload):
    return ip_packet(src, dst, 17, struct.pack("!HHHH", sport, dport, 8 + len(payload), 0) + payload)


def hardware_address(device):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    return fcntl.ioctl(s, 0x8927, struct.pack("16s16x", device.encode()))[18:24]  # SIOCGIFHWADDR


def forge_frame(packet, device, mac):
    """Sends a whole IP packet by a device, past routing."""
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    s.bind((device, 0))
    s.send(bytes.fromhex(mac.replace(":", "")) + hardware_address(device) + b"\x08\x00" + packet)
    s.close()


def forge(packet, dst):
    """Sends a whole IP packet."""
    s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    s.sendto(packet, (dst, 0))
    s.close()


def vxlan(vni, node, packet, kind=0x0800):
    """A UDP payload: network vni with a packet for node's overlay device inside."""
    frame = b"\x02\x48" + socket.inet_aton(node) + bytes(6)
    return struct.pack("!II", 0x08000000, vni << 8) + frame + struct.pack("!H", kind) + packet


def fragments(packet, size):
    """Cuts an IPv4 packet into fragments with size bytes of payload each, a multiple of 8."""
    head, payload = packet[:20], packet[20:]
    out = []
    for at in range(0, len(payload), size):
        part = payload[at : at + size]
        more = 0x2000 if at + size < len(payload) else 0
        h = head[:2] + struct.pack("!HHH", 20 + len(part), 4711, more | at // 8) + head[8:10] + b"\0\0" + head[12:]
        out.append(h[:10] + struct.pack("!H", internet_sum(h)) + h[12:] + part)
    return out


def forge_raw(payload, device, mac, kind):
    """Sends a whole frame of any kind by a device."""
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    s.bind((device, 0))
    s.send(bytes.fromhex(mac.replace(":", "")) + hardware_address(device) + struct.pack("!H", kind) + payload)
    s.close()


def arp_request(sender, target):
    mac = hardware_address("eth0")
    return struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + mac + socket.inet_aton(sender) + bytes(6) + socket.inet_aton(target)


def ethernet(packet, mac, kind=0x0800):
    """A whole frame for the node's end of eth0."""
    return bytes.fromhex(mac.replace(":", "")) + hardware_address("eth0") + struct.pack("!H", kind) + packet


def forge_unfinished(frame, flags=0, gso=0, headers=0, size=0, start=0, offset=0, bypass=0):
    """Sends a frame that the kernel is to complete: what is said of it is struct virtio_net_hdr. Offsets are into the frame."""
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    s.bind(("eth0", 0))
    s.setsockopt(263, 15, 1)  # SOL_PACKET, PACKET_VNET_HDR
    s.setsockopt(263, 20, bypass)  # PACKET_QDISC_BYPASS
    try:
        s.send(struct.pack("=BBHHHH", flags, gso, headers, size, start, offset) + frame)
    finally:
        s.close()


def adding_up(packet, start, want):
    """The packet with other two last bytes, by which the checksum of what lies behind start, an even number of bytes, is want."""
    packet = packet[:-2] + bytes(2)
    rest = (~want & 0xFFFF) - (~internet_sum(packet[start:]) & 0xFFFF)
    return packet[:-2] + struct.pack("!H", rest % 0xFFFF)
