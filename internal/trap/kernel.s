// Empty: with it in the package, functions of kernel.go may be without a body.
