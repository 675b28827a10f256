package congestion

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// What the library has no names for, of linux/bpf.h.
const (
	linkFlag     = 1 << 13 // BPF_F_LINK
	objGetInfo   = 15      // BPF_OBJ_GET_INFO_BY_FD
	linkUpdate   = 29      // BPF_LINK_UPDATE
	linkInfoSize = 64      // more than the part of struct bpf_link_info that is read
)

func bpf(command uintptr, attr unsafe.Pointer, size uintptr) error {
	if _, _, errno := unix.Syscall(unix.SYS_BPF, command, uintptr(attr), size); errno != 0 {
		return errno
	}
	return nil
}

func descriptor(l link.Link) (uint32, error) {
	raw, ok := l.(interface{ FD() int })
	if !ok {
		return 0, fmt.Errorf("a %T has no descriptor", l)
	}
	return uint32(raw.FD()), nil
}

// mapOf gives the name of the map that a link has registered; "" if it is no link of a struct_ops.
func mapOf(l link.Link) (string, error) {
	fd, err := descriptor(l)
	if err != nil {
		return "", err
	}
	var info [linkInfoSize / 4]uint32 // type, id, program, padding, then the map's id
	attr := struct {
		fd, size uint32
		info     unsafe.Pointer
	}{fd, linkInfoSize, unsafe.Pointer(&info)}
	if err := bpf(objGetInfo, unsafe.Pointer(&attr), unsafe.Sizeof(attr)); err != nil {
		return "", fmt.Errorf("ask for a link: %w", err)
	}
	if link.Type(info[0]) != link.StructOpsType {
		return "", nil
	}
	m, err := ebpf.NewMapFromID(ebpf.MapID(info[4]))
	if errors.Is(err, unix.ENOENT) {
		return "", nil // it is about to go
	}
	if err != nil {
		return "", fmt.Errorf("open the map of a struct_ops: %w", err)
	}
	defer m.Close()
	i, err := m.Info()
	if err != nil {
		return "", fmt.Errorf("ask for the map of a struct_ops: %w", err)
	}
	return i.Name, nil
}

// replace registers the congestion control of m in the place of the one of a link, which has the
// same name: new connections have the new one, at no moment none.
func replace(l link.Link, m *ebpf.Map) error {
	fd, err := descriptor(l)
	if err != nil {
		return err
	}
	attr := struct{ link, m, flags, old uint32 }{fd, uint32(m.FD()), 0, 0}
	if err := bpf(linkUpdate, unsafe.Pointer(&attr), unsafe.Sizeof(attr)); err != nil {
		return fmt.Errorf("replace a congestion control: %w", err)
	}
	return nil
}

// find gives the link by which an agent of this kernel, perhaps another node's, has registered an
// object; nil if none has.
func find(name string) (link.Link, error) {
	var links link.Iterator
	defer links.Close()
	for links.Next() {
		if have, err := mapOf(links.Link); err == nil && have == name {
			return links.Take(), nil
		}
	}
	if err := links.Err(); err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	return nil, nil
}
