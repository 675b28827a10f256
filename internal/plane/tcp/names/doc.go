// Package names has what the programs in bpf/ say by number and the TCP plane by name: the paths
// and the reasons of bpf/include/abi. It has no code of the plane's: whoever knows the names need
// not have the programs.
package names
