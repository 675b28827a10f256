import java.net.Socket;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;

/** A client on the JDK's HttpClient: java Client ADDRESS PORT. Prints what it was answered. */
public class Client {
    static final int REQUESTS = 50;
    static final int UPLOAD_BYTES = 1 << 20;

    public static void main(String[] args) throws Exception {
        String base = "http://" + args[0] + ":" + args[1];
        HttpClient client = HttpClient.newBuilder().connectTimeout(Duration.ofSeconds(20)).build();
        show(client.send(get(base + "/seen"), BodyHandlers.ofByteArray()));
        show(client.send(get(base + "/large"), BodyHandlers.ofByteArray()));
        show(client.send(get(base + "/none"), BodyHandlers.ofByteArray()));
        byte[] upload = new byte[UPLOAD_BYTES];
        for (int i = 0; i < upload.length; i++) {
            upload[i] = (byte) (i * 11L % 241);
        }
        show(client.send(HttpRequest.newBuilder(URI.create(base + "/upload")).POST(BodyPublishers.ofByteArray(upload)).build(),
                BodyHandlers.ofByteArray()));

        List<CompletableFuture<HttpResponse<String>>> answers = new ArrayList<>();
        for (int i = 0; i < REQUESTS; i++) {
            answers.add(client.sendAsync(get(base + "/seen"), BodyHandlers.ofString()));
        }
        TreeMap<String, Integer> counts = new TreeMap<>();
        for (CompletableFuture<HttpResponse<String>> answer : answers) {
            counts.merge(answer.get().statusCode() + " " + answer.get().body().strip(), 1, Integer::sum);
        }
        System.out.println("at once: " + counts);

        // The blocking API, on an IPv6 socket underneath.
        try (Socket socket = new Socket(args[0], Integer.parseInt(args[1]))) {
            socket.getOutputStream().write(("GET /seen HTTP/1.0\r\n\r\n").getBytes(StandardCharsets.UTF_8));
            String answer = new String(socket.getInputStream().readAllBytes(), StandardCharsets.UTF_8);
            System.out.println("socket " + socket.getLocalAddress() + " -> " + socket.getRemoteSocketAddress() + " "
                    + answer.substring(answer.indexOf("\r\n\r\n")).strip());
        }
    }

    static HttpRequest get(String uri) {
        return HttpRequest.newBuilder(URI.create(uri)).timeout(Duration.ofSeconds(20)).build();
    }

    static void show(HttpResponse<byte[]> response) {
        byte[] body = response.body();
        TreeMap<String, List<String>> headers = new TreeMap<>(response.headers().map());
        headers.remove("date");
        System.out.println(response.uri() + " " + response.version() + " " + response.statusCode() + " " + headers + " " + body.length
                + " bytes, SHA-256 " + Server.sum(body) + (body.length < 1000 ? " " + new String(body, StandardCharsets.UTF_8).strip() : ""));
    }
}
