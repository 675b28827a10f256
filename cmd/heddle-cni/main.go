// Command heddle-cni is a CNI plugin: container runtimes start it to join a container's network
// namespace to Heddle's overlay. It asks the node's agent, heddled, for everything.
package main

import "heddle.dev/heddle/internal/cni"

func main() { cni.Main("heddle-cni: CNI plugin of Heddle, a container network") }
