package datapath

import "heddle.dev/heddle/internal/model"

func takesDirect(ports model.PortRange) model.NodePlanes {
	return model.NodePlanes{TCP: model.TCPNode{DirectPorts: ports}}
}

func intercepted(is bool) model.EndpointPlanes {
	return model.EndpointPlanes{TCP: model.TCPEndpoint{Intercepted: is}}
}
